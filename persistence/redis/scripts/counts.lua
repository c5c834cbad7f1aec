-- Compare the states of a stage in one bucket with their number.
--
-- KEYS  1 the bucket, 2 the states of the stage in this bucket
-- Returns the number that the last save left, and the number that exists.

local stage = string.sub(KEYS[2], #KEYS[1] + 1) -- begins with the colon
return {tonumber(redis.call('HGET', KEYS[1], 'states' .. stage) or '0'), redis.call('HLEN', KEYS[2])}
