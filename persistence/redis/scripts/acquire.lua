-- Take the next term of a flow.
--
-- KEYS  1 the flow's hash      ARGV  1 a term to be above, 2 number of buckets for a new flow
-- Returns the term and the number of buckets.

local term = math.max(tonumber(redis.call('HGET', KEYS[1], 'term') or '0'), tonumber(ARGV[1])) + 1
term = string.format('%.0f', term)
redis.call('HSET', KEYS[1], 'term', term)
redis.call('HSETNX', KEYS[1], 'buckets', ARGV[2])
return {term, redis.call('HGET', KEYS[1], 'buckets')}
