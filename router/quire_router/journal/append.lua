-- Writes deliveries (tokens and marks) at a place in their row, and renews the lease; without any it only renews.
-- KEYS: record, tokens. ARGV: owner, epoch, lease (ms), time to live (s), offset in bytes, packed deliveries.
-- Returns 1; 0 when a newer epoch or another owner holds the record; -1 when the record or tokens before these are gone.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'reason')
if not stored[1] then
  return -1
end
local held, epoch = tonumber(stored[1]), tonumber(ARGV[2])
if held > epoch or (held == epoch and stored[2] ~= ARGV[1]) then
  return 0
end
if stored[3] then
  return 1 -- it has ended, so this is a repeat
end
if redis.call('STRLEN', KEYS[2]) < tonumber(ARGV[5]) then
  return -1
end
if #ARGV[6] > 0 then
  redis.call('SETRANGE', KEYS[2], ARGV[5], ARGV[6])
end
local now = redis.call('TIME')
local expires = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', ARGV[2], 'lease_expires', string.format('%.0f', expires))
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
