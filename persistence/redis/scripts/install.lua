-- Make a epoch the installed one, of the flow or of one bucket, unless a higher one is.
--
-- KEYS  1 the flow's or the bucket's hash      ARGV  1 epoch, 2 number of buckets
-- Returns the installed epoch and the number of buckets.

local installed = redis.call('HGET', KEYS[1], 'epoch') or '0'
redis.call('HSETNX', KEYS[1], 'buckets', ARGV[2])
if tonumber(installed) <= tonumber(ARGV[1]) then
  -- Written even when it is the same: everything before it is then acknowledged by one WAIT.
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
  installed = ARGV[1]
end
return {installed, redis.call('HGET', KEYS[1], 'buckets')}
