-- What one router has, until its lease is over; forgets the routers whose lease is. Redis is the clock.
-- KEYS: leases, parts, born. ARGV: router, its part (empty: it goes), lease (ms).
-- ``born`` is when somebody was first there after nobody was: what is read before every router has had the time to tell
-- its part would be too little.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local mine, born = redis.call('ZSCORE', KEYS[1], ARGV[1]), redis.call('GET', KEYS[3])
if mine and tonumber(mine) > now + ARGV[3] or born and tonumber(born) > now then
  redis.call('DEL', unpack(KEYS)) -- the clock went back, and what is dead would count until it is there again
end
local over = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, 1000)
if ARGV[2] == '' then
  table.insert(over, ARGV[1])
end
if #over > 0 then
  redis.call('ZREM', KEYS[1], unpack(over))
  redis.call('HDEL', KEYS[2], unpack(over))
end
if ARGV[2] ~= '' then
  if redis.call('EXISTS', KEYS[1], KEYS[3]) < 2 then -- nobody, or one of the keys was lost
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
