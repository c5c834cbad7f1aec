-- Replace states of one bucket, each only if its version matches. All or none.
--
-- KEYS  1 the bucket, 2 the states of the stage in this bucket, 3 the times at which they are due
-- ARGV  1 epoch, 2 count and 3 life of the mark that the bucket is known to have reached (0 for none),
--       4 marks that stages downstream have acknowledged, 5 expected versions, as "VERSION STATES VERSION STATES ...",
--       6 a new random id, which becomes a part of the bucket's point (persistence.redis.versions),
--       7 due times, as "NUMBER TIME NUMBER TIME ..." by the number of the state, from 1; empty for none,
--       then for each state: key, new content, which is "VERSION EPOCH BATCH VALUE"
-- Returns the bucket's mark: "COUNT LIFE:BEGIN LIFE:BEGIN ...", newest life first, as in persistence.marks.
--
-- Everything is validated before anything is written, since Redis does not roll back a script that fails.
-- A write that was applied before (same version, epoch, batch and value) counts as done. So the script may
-- be sent again after a lost answer: it reads back and decides in one atomic step.
--
-- Every argument and every answer is copied into a new string of Lua, which is most of what this script costs. So it
-- takes no name twice, reads a state's version and value at once, and hands its arguments on as they are.

local ARGV = ARGV -- access to a local is much faster than to a global, and this is the hot path
local call, match, sub = redis.call, string.match, string.sub
local epoch, first = ARGV[1], 8
local mine = tonumber(epoch)

local stage = sub(KEYS[2], #KEYS[1] + 1) -- begins with the colon
local found = call('HMGET', KEYS[1], 'epoch', 'mark' .. stage, 'states' .. stage)
local installed, mark, states = found[1] or '0', found[2] or '0', tonumber(found[3] or '0')
if installed ~= epoch then
  return {tonumber(installed) > mine and 'FENCED' or 'UNKNOWN', installed}
end

local count, newest, lives = match(mark, '^(%d+) ?(%w*)(.*)$')
if not count then return {'DAMAGED'} end
lives = newest .. lives
local known, held, upper = tonumber(ARGV[2]), false, tonumber(count)
for life, begin in string.gmatch(lives, '(%w+):(%d+)') do
  begin = tonumber(begin)
  if life == ARGV[3] and begin < known and known <= upper then held = true end
  upper = begin
end
if not held and known > upper then return {'BEHIND', mark} end
local there = call('HLEN', KEYS[2])
if there ~= states then return {'LOST', states, there} end

local n = (#ARGV - first + 1) / 2
local keys = {}
for i = 1, n do keys[i] = ARGV[first + 2 * i - 2] end
local dues
if ARGV[7] ~= '' then
  local removed = tonumber(call('HGET', KEYS[1], 'removed' .. stage) or '')
  local gone = {'CONFLICT'}
  dues = {}
  for number, due in string.gmatch(ARGV[7], '(%d+) (-?%d+)') do
    if removed and tonumber(due) <= removed then gone[#gone + 1] = number - 1 end
    dues[#dues + 1], dues[#dues + 2] = due, keys[tonumber(number)]
  end
  if #gone > 1 then return gone end
end
local stored = call('HMGET', KEYS[2], unpack(keys))

local changed, done, i = {'CONFLICT'}, {}, 0
local versions = {} -- many states have the same head: each is parsed once
for expected, same in string.gmatch(ARGV[5], '(%d+) (%d+)') do
  for j = i + 1, i + same do
    local content, version = stored[j], '0'
    if content then
      local head = match(content, '^%d+ %d+ %d+ ')
      if not head then return {'DAMAGED', j - 1} end
      version = versions[head]
      if not version then
        local by
        version, by = match(head, '^(%d+) (%d+)')
        if tonumber(by) > mine then return {'NEWER', j - 1, by} end
        versions[head] = version
      end
    end
    if version ~= expected then
      if content == ARGV[first + 2 * j - 1] then done[j] = true else changed[#changed + 1] = j - 1 end
    end
  end
  i = i + same
end
if #changed > 1 then return changed end

local added
if next(done) == nil then
  added = call('HSET', KEYS[2], unpack(ARGV, first))
else
  local left, m = {}, 0
  for j = 1, n do
    if not done[j] then
      left[m + 1], left[m + 2], m = keys[j], ARGV[first + 2 * j - 1], m + 2
    end
  end
  if m == 0 then
    -- All states were written before; this write gives WAIT something to wait for.
    call('HSET', KEYS[1], 'epoch', epoch)
    return mark
  end
  added = call('HSET', KEYS[2], unpack(left))
end
if dues then call('ZADD', KEYS[3], 'GT', unpack(dues)) end
local life = sub(match(call('INFO', 'server'), 'run_id:(%w+)') or '', 1, 12)
if newest ~= life then
  lives = life .. ':' .. count .. (lives ~= '' and ' ' .. lives or '')
  lives = match(lives, '^' .. string.rep('%S+ ', 7) .. '%S+') or lives -- the newest eight
end
mark = (count + 1) .. ' ' .. lives
call('HSET', KEYS[1], 'epoch', epoch, 'mark' .. stage, mark, 'states' .. stage, states + added,
  'save' .. stage, ARGV[6])
if ARGV[4] ~= '' then call('HSET', KEYS[1], 'downstream' .. stage, ARGV[4]) end
return mark
