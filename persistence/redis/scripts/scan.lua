-- Return some states of one bucket.
--
-- KEYS  1 the states of the stage in this bucket
-- ARGV  1 cursor: 0 for the first call, then the returned one; 2 approximate number of states
-- Returns the id of the server process, the next cursor (0 at the end), and keys and contents alternately.

local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or '', page[1], page[2]}
