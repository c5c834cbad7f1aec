-- Take the next epoch of a flow.
--
-- KEYS  1 the flow's hash      ARGV  1 an epoch to exceed, 2 number of buckets for a new flow
-- Returns the epoch and the number of buckets.

local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0'), tonumber(ARGV[1])) + 1
epoch = string.format('%.0f', epoch)
redis.call('HSET', KEYS[1], 'epoch', epoch)
redis.call('HSETNX', KEYS[1], 'buckets', ARGV[2])
return {epoch, redis.call('HGET', KEYS[1], 'buckets')}
