-- Counts the bytes of a name in an account, instead of those that were counted of it before. KEYS: expirations, a sorted
-- set of the names by when (s) they expire; sizes, a hash of their bytes, and of 'total'. ARGV: name, bytes (empty: the
-- name leaves), seconds until it expires, the most names and the most bytes (empty: any).
-- Returns 0; or 1 for too many names and 2 for too many bytes, and has changed nothing then but what had expired.
local EXPIRATIONS, SIZES = KEYS[1], KEYS[2]
local name, size = 'of ' .. ARGV[1], tonumber(ARGV[2])
local now = tonumber(redis.call('TIME')[1])

local function leave(each) -- a Redis that is out of memory takes HINCRBY in a script that has written already
  local before = tonumber(redis.call('HGET', SIZES, each) or '')
  redis.call('ZREM', EXPIRATIONS, each)
  redis.call('HDEL', SIZES, each)
  if before and before > 0 then -- Redis takes no -0
    redis.call('HINCRBY', SIZES, 'total', string.format('-%.0f', before))
  end
end

for _, each in ipairs(redis.call('ZRANGEBYSCORE', EXPIRATIONS, '-inf', now, 'LIMIT', 0, 1000)) do
  leave(each)
end
if not size then
  leave(name)
  return 0
end
local before = tonumber(redis.call('HGET', SIZES, name) or '')
local total = tonumber(redis.call('HGET', SIZES, 'total') or '0')
if not before and ARGV[4] ~= '' and redis.call('ZCARD', EXPIRATIONS) >= tonumber(ARGV[4]) then
  return 1
elseif ARGV[5] ~= '' and size > (before or 0) and total - (before or 0) + size > tonumber(ARGV[5]) then
  return 2
end
redis.call('HSET', SIZES, name, string.format('%.0f', size))
redis.call('HINCRBY', SIZES, 'total', string.format('%.0f', size - (before or 0)))
redis.call('ZADD', EXPIRATIONS, now + tonumber(ARGV[3]), name)
local last = redis.call('ZRANGE', EXPIRATIONS, -1, -1, 'WITHSCORES')[2]
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, string.format('%.0f', math.max(1, last - now)))
end
return 0
