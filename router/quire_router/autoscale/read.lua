-- The parts of all routers whose lease is not over. Redis is the clock.
-- KEYS: leases, parts, born (see tell.lua). ARGV: how many parts at most.
-- Returns how long somebody has been there (ms; -1: nobody is), how many routers there are, and their parts.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local routers = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf', 'LIMIT', 0, ARGV[1] + 1)
local born = redis.call('GET', KEYS[3])
if not born or #routers == 0 then
  return {-1, 0, {}}
end
if #routers > tonumber(ARGV[1]) then
  return {now - born, #routers, {}}
end
return {now - born, #routers, redis.call('HMGET', KEYS[2], unpack(routers))}
