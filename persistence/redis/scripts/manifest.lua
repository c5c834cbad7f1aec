-- Replace a flow's manifest; within an epoch the batch never decreases.
--
-- KEYS  1 the flow's hash      ARGV  1 epoch, 2 batch, 3 manifest, 4 epoch and 5 batch of the manifest known to be stored
-- A repeated call changes nothing, so it may be sent again after a lost answer.

local mine, batch = tonumber(ARGV[1]), tonumber(ARGV[2])
local installed = redis.call('HGET', KEYS[1], 'epoch') or '0'
if tonumber(installed) > mine then return {'FENCED', installed} end
if tonumber(installed) < mine then return {'UNKNOWN', installed} end

local head = redis.call('HGET', KEYS[1], 'manifest_head') or '0 0'
local epoch, last = string.match(head, '^(%d+) (%d+)$')
if not epoch then return {'DAMAGED'} end
local known = tonumber(ARGV[4])
if tonumber(epoch) < known or (tonumber(epoch) == known and tonumber(last) < tonumber(ARGV[5])) then
  return {'BEHIND', epoch, last}
end
if tonumber(epoch) > mine or (tonumber(epoch) == mine and tonumber(last) > batch) then
  return {'OLDER', epoch, last}
end
redis.call('HSET', KEYS[1], 'manifest_head', ARGV[1] .. ' ' .. ARGV[2], 'manifest', ARGV[3])
return 0
