-- Read states of one bucket.
--
-- KEYS  1 the index of the stage in this bucket, 2... states
-- Returns head and value of each in turn, nil where there is no state.

local KEYS, call = KEYS, redis.call
local first = #KEYS[1] + 2
local found, n = {}, 0
for i = 2, #KEYS do
  local state = call('HMGET', KEYS[i], 'head', 'value')
  if not state[1] and call('SISMEMBER', KEYS[1], string.sub(KEYS[i], first)) == 1 then
    return {'VANISHED', i - 2}
  end
  found[n + 1], found[n + 2], n = state[1], state[2], n + 2
end
return found
