-- Reads the loads of all routers whose lease has not expired. Redis is the clock.
-- KEYS: leases, parts, born (see publish_load.lua). ARGV: how many loads at most.
-- Returns for how long there has been a router (ms; -1: there is none), how many there are, and their loads.
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
