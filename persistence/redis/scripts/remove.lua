-- Remove states of one bucket that are due, the earliest first.
--
-- KEYS  1 the bucket, 2 the states of the stage in this bucket, 3 the times at which they are due
-- ARGV  1 epoch, 2 count and 3 life of the mark that the bucket is known to have reached (0 for none),
--       4 the time until which states are removed, 5 maximum number of states, 6 a new random id
-- Returns the bucket's mark, and the number of removed states; fewer than the maximum if no further one is due.
-- A repeated call removes further states or none, so it may be sent again after a lost answer.

local call, match = redis.call, string.match
local mine, stage = tonumber(ARGV[1]), string.sub(KEYS[2], #KEYS[1] + 1) -- begins with the colon
local found = call('HMGET', KEYS[1], 'epoch', 'mark' .. stage, 'states' .. stage, 'removed' .. stage)
local installed, mark, states, removed = found[1] or '0', found[2] or '0', tonumber(found[3] or '0'), found[4]
if tonumber(installed) ~= mine then
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

if not removed or tonumber(removed) < tonumber(ARGV[4]) then removed = ARGV[4] end
local keys = call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[4], 'LIMIT', 0, ARGV[5])
if #keys == 0 then
  call('HSET', KEYS[1], 'epoch', ARGV[1], 'removed' .. stage, removed)
  return {'REMOVED', mark, 0}
end
local gone = call('HDEL', KEYS[2], unpack(keys))
call('ZREM', KEYS[3], unpack(keys))
local life = string.sub(match(call('INFO', 'server'), 'run_id:(%w+)') or '', 1, 12)
if newest ~= life then
  lives = life .. ':' .. count .. (lives ~= '' and ' ' .. lives or '')
  lives = match(lives, '^' .. string.rep('%S+ ', 7) .. '%S+') or lives -- the newest eight
end
mark = (count + 1) .. ' ' .. lives
call('HSET', KEYS[1], 'epoch', ARGV[1], 'mark' .. stage, mark, 'states' .. stage, states - gone,
  'save' .. stage, ARGV[6], 'removed' .. stage, removed)
return {'REMOVED', mark, #keys}
