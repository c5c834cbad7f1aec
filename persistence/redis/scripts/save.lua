-- Replace states of one bucket, each on condition of its version. All or none.
--
-- KEYS  1 the bucket's hash, 2 the index of the stage in this bucket, 3... states
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

local first = #KEYS[2] + 2 -- where the state's own key begins in its name
local versions, heads = {}, {} -- many states of a batch have the same head: each is read and made once
local changed, done = {'CONFLICT'}, {}
for i = 3, #KEYS do
  local expected = ARGV[2 * i - 3]
  local following = heads[expected]
  if not following then
    following = (expected + 1) .. tail
    heads[expected] = following
  end
  local head = call('HGET', KEYS[i], 'head')
  if head then
    local version = versions[head]
    if not version then
      local by
      version, by = match(head, '^(%d+) (%d+) %d+$')
      if not version then return {'DAMAGED', i - 3} end
      if tonumber(by) > mine then return {'NEWER', i - 3, by} end
      versions[head] = version
    end
    if version ~= expected then
      if head == following and call('HGET', KEYS[i], 'value') == ARGV[2 * i - 2] then
        done[i] = true
      else
        changed[#changed + 1] = i - 3
      end
    end
  elseif call('SISMEMBER', KEYS[2], sub(KEYS[i], first)) == 1 then
    return {'VANISHED', i - 3}
  elseif expected ~= '0' then
    changed[#changed + 1] = i - 3
  end
end
if #changed > 1 then return changed end

-- A write that WAIT can wait for, even when all the states were done before.
call('HSET', KEYS[1], 'term', term)
for i = 3, #KEYS do
  if not done[i] then
    local expected = ARGV[2 * i - 3]
    call('HSET', KEYS[i], 'head', heads[expected], 'value', ARGV[2 * i - 2])
    if expected == '0' then call('SADD', KEYS[2], sub(KEYS[i], first)) end
  end
end
return 0
