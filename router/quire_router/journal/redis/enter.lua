-- Adds a name to a collection, and removes those that have expired. KEYS: names, a sorted set by when (s) each came;
-- expirations, one by when (s) each expires. ARGV: name, seconds until it expires.
local time = redis.call('TIME')
local now = tonumber(time[1])
redis.call('ZADD', KEYS[1], 'NX', string.format('%d.%06d', time[1], time[2]), ARGV[1])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)
if #gone > 0 then
  redis.call('ZREM', KEYS[1], unpack(gone))
  redis.call('ZREM', KEYS[2], unpack(gone))
end
local left = math.ceil(redis.call('PTTL', KEYS[1]) / 1000) -- there may be names of a former release, without expirations
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, string.format('%.0f', math.max(1, left, last - now)))
end
return 1
