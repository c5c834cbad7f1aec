-- Replace states of one bucket, each only if its version matches. All or none.
--
-- KEYS  1 the bucket, 2 the heads of the stage in this bucket, 3... states
-- ARGV  1 epoch, 2 batch, 3 count and 4 life of the mark that the bucket is known to have reached (0 for none),
--       5 marks that stages downstream have acknowledged, then for each state: expected version, value
-- Returns the bucket's mark: "COUNT LIFE:BEGIN LIFE:BEGIN ...", newest life first, as in persistence.marks.
--
-- Everything is validated before anything is written, since Redis does not roll back a script that fails.
-- A write that was applied before (same version, epoch, batch and value) counts as done. So the script may
-- be sent again after a lost answer: it reads back and decides in one atomic step.

local KEYS, ARGV = KEYS, ARGV -- access to a local is much faster than to a global, and this is the hot path
local call, match, sub = redis.call, string.match, string.sub
local epoch, tail = ARGV[1], ' ' .. ARGV[1] .. ' ' .. ARGV[2]
local mine = tonumber(epoch)

local stage = sub(KEYS[2], #KEYS[1] + 1) -- begins with the colon
local found = call('HMGET', KEYS[1], 'epoch', 'mark' .. stage)
local installed, mark = found[1] or '0', found[2] or '0'
if installed ~= epoch then
  return {tonumber(installed) > mine and 'FENCED' or 'UNKNOWN', installed}
end

local count, newest, lives = match(mark, '^(%d+) ?(%w*)(.*)$')
if not count then return {'DAMAGED'} end
lives = newest .. lives
local known, held, upper = tonumber(ARGV[3]), false, tonumber(count)
for life, begin in string.gmatch(lives, '(%w+):(%d+)') do
  begin = tonumber(begin)
  if life == ARGV[4] and begin < known and known <= upper then held = true end
  upper = begin
end
if not held and known > upper then return {'BEHIND', mark} end

local n, first = #KEYS - 2, #KEYS[2] + 2 -- where the state's own key begins in its name
local keys = {}
for i = 1, n do keys[i] = sub(KEYS[i + 2], first) end
local heads = call('HMGET', KEYS[2], unpack(keys))

local changed, states, heads_after, m = {'CONFLICT'}, {}, {}, 0
local versions, followings = {}, {} -- many states of a batch have the same head: each is parsed and built once
for i = 1, n do
  local head, expected, value = heads[i], ARGV[2 * i + 4], ARGV[2 * i + 5]
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
    states[m + 1], states[m + 2], heads_after[m + 1], heads_after[m + 2], m = KEYS[i + 2], value, keys[i], following, m + 2
  elseif head ~= following or call('GET', KEYS[i + 2]) ~= value then
    changed[#changed + 1] = i - 1
  end
end
if #changed > 1 then return changed end

if m == 0 then
  -- All states were written before; this write gives WAIT something to wait for.
  call('HSET', KEYS[1], 'epoch', epoch)
  return mark
end
local life = sub(match(call('INFO', 'server'), 'run_id:(%w+)') or '', 1, 12)
if newest ~= life then
  lives = life .. ':' .. count .. (lives ~= '' and ' ' .. lives or '')
  lives = match(lives, '^' .. string.rep('%S+ ', 7) .. '%S+') or lives -- the newest eight
end
mark = (count + 1) .. ' ' .. lives
if ARGV[5] == '' then
  call('HSET', KEYS[1], 'epoch', epoch, 'mark' .. stage, mark)
else
  call('HSET', KEYS[1], 'epoch', epoch, 'mark' .. stage, mark, 'downstream' .. stage, ARGV[5])
end
call('MSET', unpack(states))
call('HSET', KEYS[2], unpack(heads_after))
return mark
