-- Replace a flow's manifest; within a term the batch never goes back.
--
-- KEYS  1 the flow's hash      ARGV  1 term, 2 batch, 3 manifest
-- The same again changes nothing, so it may be sent again after a lost answer.

local mine, batch = tonumber(ARGV[1]), tonumber(ARGV[2])
local installed = redis.call('HGET', KEYS[1], 'term') or '0'
if tonumber(installed) > mine then return {'FENCED', installed} end
if tonumber(installed) < mine then return {'UNKNOWN', installed} end

local head = redis.call('HGET', KEYS[1], 'manifest_head')
if head then
  local term, last = string.match(head, '^(%d+) (%d+)$')
  if not term then return {'DAMAGED'} end
  if tonumber(term) > mine or (tonumber(term) == mine and tonumber(last) > batch) then
    return {'OLDER', term, last}
  end
end
redis.call('HSET', KEYS[1], 'manifest_head', ARGV[1] .. ' ' .. ARGV[2], 'manifest', ARGV[3])
return 0
