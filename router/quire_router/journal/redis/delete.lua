-- Deletes a record that has ended. Of one that has not, the request is cancelled, and its record is kept for no longer
-- than ARGV: retention (s) after its end. Returns 1, or 0 when there is none.
local record = stored()
if not record then
  return 0
elseif record.ended then
  redis.call('DEL', RECORD, TOKENS)
  return 1
end
redis.call('HSET', RECORD, 'retention', ARGV[1])
record.retention = ARGV[1]
if record.leased then
  redis.call('HSET', RECORD, 'cancelled', 1)
else
  abort(record, ARGV[1])
end
return 1
