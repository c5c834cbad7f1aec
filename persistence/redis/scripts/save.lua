-- Replace states of one bucket, each on condition of its version. All or none.
--
-- KEYS  1 the bucket, 2 the heads of the stage in this bucket, 3... states
-- ARGV  1 term, 2 batch, then for each state: expected version, value
--
-- Everything is validated before anything is written: a script that fails half way is not undone.
-- Found applied already (same version, term, batch and value) counts as done. So the script may be
-- sent again after a lost answer: it reads back and decides in one atomic step.

local KEYS, ARGV = KEYS, ARGV -- a local is reached much faster than a global, and this is the hot path
local call, match, sub = redis.call, string.match, string.sub
local term, tail = ARGV[1], ' ' .. ARGV[1] .. ' ' .. ARGV[2]
local mine = tonumber(term)

local installed = call('HGET', KEYS[1], 'term') or '0'
if installed ~= term then
  return {tonumber(installed) > mine and 'FENCED' or 'UNKNOWN', installed}
end

local n, first = #KEYS - 2, #KEYS[2] + 2 -- where the state's own key begins in its name
local keys = {}
for i = 1, n do keys[i] = sub(KEYS[i + 2], first) end
local heads = call('HMGET', KEYS[2], unpack(keys))

local changed, states, marks, m = {'CONFLICT'}, {}, {}, 0
local versions, followings = {}, {} -- many states of a batch have the same head: each is read and made once
for i = 1, n do
  local head, expected, value = heads[i], ARGV[2 * i + 1], ARGV[2 * i + 2]
  local version = '0'
  if head then
    version = versions[head]
    if not version then
      local by
      version, by = match(head, '^(%d+) (%d+) %d+$')
      if not version then return {'DAMAGED', i - 1} end
      if tonumber(by) > mine then return {'NEWER', i - 1, by} end
      versions[head] = version
    end
  end
  local following = followings[expected]
  if not following then
    following = (expected + 1) .. tail
    followings[expected] = following
  end
  if version == expected then
    states[m + 1], states[m + 2], marks[m + 1], marks[m + 2], m = KEYS[i + 2], value, keys[i], following, m + 2
  elseif head ~= following or call('GET', KEYS[i + 2]) ~= value then
    changed[#changed + 1] = i - 1
  end
end
if #changed > 1 then return changed end

-- A write that WAIT can wait for, even when all the states were done before.
call('HSET', KEYS[1], 'term', term)
if m > 0 then
  call('MSET', unpack(states))
  call('HSET', KEYS[2], unpack(marks))
end
return 0
