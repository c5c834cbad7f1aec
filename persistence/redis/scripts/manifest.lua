-- Replace a flow's manifest; within a term the batch never goes back.
--
-- KEYS  1 the flow's hash      ARGV  1 term, 2 batch, 3 manifest, 4 term and 5 batch of the one that is known to be there
-- The same again changes nothing, so it may be sent again after a lost answer.

local mine, batch = tonumber(ARGV[1]), tonumber(ARGV[2])
local installed = redis.call('HGET', KEYS[1], 'term') or '0'
if tonumber(installed) > mine then return {'FENCED', installed} end
if tonumber(installed) < mine then return {'UNKNOWN', installed} end

local head = redis.call('HGET', KEYS[1], 'manifest_head') or '0 0'
local term, last = string.match(head, '^(%d+) (%d+)$')
if not term then return {'DAMAGED'} end
local known = tonumber(ARGV[4])
if tonumber(term) < known or (tonumber(term) == known and tonumber(last) < tonumber(ARGV[5])) then
  return {'BEHIND', term, last}
end
if tonumber(term) > mine or (tonumber(term) == mine and tonumber(last) > batch) then
  return {'OLDER', term, last}
end
redis.call('HSET', KEYS[1], 'manifest_head', ARGV[1] .. ' ' .. ARGV[2], 'manifest', ARGV[3])
return 0
