-- Tell some keys of the states of one bucket.
--
-- KEYS  1 the heads of the stage in this bucket
-- ARGV  1 where to go on: 0 at the beginning, else what the last call told; 2 about how many
-- Returns which server process this is, where to go on (0 at the end), and keys with heads in turns.

local told = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or '', told[1], told[2]}
