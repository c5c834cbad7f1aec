-- Read states of one bucket.
--
-- KEYS  1 the heads of the stage in this bucket, 2... states
-- Returns their heads and their values, nil for a missing one.

local KEYS, sub = KEYS, string.sub
local first, keys = #KEYS[1] + 2, {}
for i = 2, #KEYS do keys[i - 1] = sub(KEYS[i], first) end
return {redis.call('HMGET', KEYS[1], unpack(keys)), redis.call('MGET', unpack(KEYS, 2))}
