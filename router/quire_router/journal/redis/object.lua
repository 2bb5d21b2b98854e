-- Replaces the text of an object if its version is the one that the caller read; 0 for an object that is not there.
-- KEYS: object, parts. ARGV: version, data, seconds until both expire, "drop" to delete the parts. Returns 1, or 0 when
-- it is another version. One that was replaced with just this by a call whose reply was lost counts as replaced.
local values = redis.call('HMGET', KEYS[1], 'version', 'data')
local version = tonumber(values[1] or '0')
local given = tonumber(ARGV[1])
if version == given + 1 and values[2] == ARGV[2] then
  return 1
elseif version ~= given then
  return 0
end
redis.call('HSET', KEYS[1], 'version', string.format('%.0f', given + 1), 'data', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
if ARGV[4] == 'drop' then
  redis.call('UNLINK', KEYS[2])
else
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return 1
