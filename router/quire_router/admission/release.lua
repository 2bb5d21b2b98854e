-- Ends a request, and gives back what it did not use.
-- KEYS: requests, tokens, running. ARGV: request ('': none has a place to lose), what is given back of a request and of
-- its tokens (us).
redis.call('ZREM', KEYS[3], ARGV[1])
for i = 1, 2 do
  local full, refund = redis.call('GET', KEYS[i]), tonumber(ARGV[i + 1])
  if full and refund > 0 then
    redis.call('SET', KEYS[i], string.format('%.0f', full - refund), 'KEEPTTL')
  end
end
return 1
