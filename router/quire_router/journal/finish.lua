-- Ends a record; it is kept for the retention time.
-- KEYS: record, tokens. ARGV: owner, epoch, length of the tokens in bytes, retention (s), reason, error.
-- Returns 1; 0 when a newer epoch or another owner holds the record; -1 when the record or some of its tokens are gone.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'reason')
if not stored[1] then
  return -1
end
local held, epoch = tonumber(stored[1]), tonumber(ARGV[2])
if held > epoch or (held == epoch and stored[2] ~= ARGV[1]) then
  return 0
end
if stored[3] then
  return 1 -- a repeat
end
if redis.call('STRLEN', KEYS[2]) ~= tonumber(ARGV[3]) then
  return -1
end
redis.call('HSET', KEYS[1], 'reason', ARGV[5], 'error', ARGV[6])
redis.call('HDEL', KEYS[1], 'lease_expires')
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
