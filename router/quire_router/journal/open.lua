-- Begins a record, or renews it when the same request was opened before.
-- KEYS: record, tokens. ARGV: owner, epoch, lease (ms), time to live (s), request, prompt.
-- Returns 1, or 0 when the record belongs to a newer epoch, another owner or another request.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'request')
local epoch = tonumber(ARGV[2])
if stored[1] then
  local newer = epoch > tonumber(stored[1])
  local same = epoch == tonumber(stored[1]) and stored[2] == ARGV[1]
  if stored[3] ~= ARGV[5] or not (newer or same) then
    return 0
  end
else
  redis.call('DEL', KEYS[2])
end
local now = redis.call('TIME')
local expires = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', ARGV[2], 'lease_expires', string.format('%.0f', expires),
  'request', ARGV[5], 'prompt', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
