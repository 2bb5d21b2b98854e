-- Ends a request, and gives back what it did not use.
-- KEYS: tokens, running. ARGV: request ('': none has a place to lose), unused (us).
redis.call('ZREM', KEYS[2], ARGV[1])
local full = redis.call('GET', KEYS[1])
if full and tonumber(ARGV[2]) > 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', full - ARGV[2]), 'KEEPTTL')
end
return 1
