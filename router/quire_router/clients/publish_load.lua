-- Publishes one router's load until its lease expires; removes the routers whose lease has. Redis is the clock.
-- KEYS: leases, parts, born. ARGV: router, its load (empty: it leaves), lease (ms).
-- ``born`` is when the first router came after there was none: what is read before every router has had the time to
-- publish would be too little.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local mine, born = redis.call('ZSCORE', KEYS[1], ARGV[1]), redis.call('GET', KEYS[3])
if mine and tonumber(mine) > now + ARGV[3] or born and tonumber(born) > now then
  redis.call('DEL', unpack(KEYS)) -- the clock went back, and dead routers would count until it has caught up
end
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000)
if ARGV[2] == '' then
  table.insert(expired, ARGV[1])
end
if #expired > 0 then
  redis.call('ZREM', KEYS[1], unpack(expired))
  redis.call('HDEL', KEYS[2], unpack(expired))
end
if ARGV[2] ~= '' then
  if redis.call('EXISTS', KEYS[1], KEYS[3]) < 2 then -- no router, or one of the keys was lost
    redis.call('SET', KEYS[3], string.format('%.0f', now))
  end
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[3]), ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  for i = 1, 3 do
    if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[3]) then
      redis.call('PEXPIRE', KEYS[i], ARGV[3])
    end
  end
end
return 1
