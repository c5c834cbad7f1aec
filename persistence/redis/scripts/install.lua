-- Install an epoch for a flow or a bucket, unless a higher one is installed.
--
-- KEYS  1 the flow's or the bucket's hash      ARGV  1 epoch, 2 number of buckets
-- Returns the installed epoch and the number of buckets.

local installed = redis.call('HGET', KEYS[1], 'epoch') or '0'
redis.call('HSETNX', KEYS[1], 'buckets', ARGV[2])
if tonumber(installed) <= tonumber(ARGV[1]) then
  -- Written even if it is the same, so that one WAIT acknowledges all earlier writes.
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  installed = ARGV[1]
end
return {installed, redis.call('HGET', KEYS[1], 'buckets')}
