-- Creates a record, or renews its lease when the same request was opened before. One that was deleted is not created
-- again (``delete.lua``).
-- KEYS: also the tombstone.
-- ARGV: owner, epoch, lease (ms), time to live (s), request, prompt, conversation (empty: none), the seal of all three,
-- its own retention (s; empty: none).
local record, epoch = stored(), tonumber(ARGV[2])
local deleted = not record and redis.call('GET', KEYS[3])
if deleted and deleted == redis.sha1hex(ARGV[5]) then
  return DELETED
elseif record then
  local same = epoch == record.epoch and ARGV[1] == record.owner
  if redis.call('HGET', RECORD, 'request') ~= ARGV[5] or not (same or epoch > record.epoch) then
    return STALE
  elseif record.ended then
    return same and DONE or STALE
  end
end
redis.call('HSET', RECORD, 'owner', ARGV[1]) -- before anything is deleted (see above)
if not record then
  redis.call('DEL', RECORD, TOKENS)
elseif epoch > record.epoch or ARGV[1] ~= record.owner then
  redis.call('DEL', TOKENS)
  redis.call('HDEL', RECORD, 'sum')
end
redis.call('HSET', RECORD, 'request', ARGV[5], 'prompt', ARGV[6], 'seal', ARGV[8])
if ARGV[7] ~= '' then
  redis.call('HSET', RECORD, 'conversation', ARGV[7])
end
redis.call('HSETNX', RECORD, 'opened', string.format('%.0f', now()))
if ARGV[9] ~= '' then
  redis.call('HSET', RECORD, 'retention', ARGV[9])
end
hold(ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4])
return DONE
