-- Asks whoever holds a record to end it, and ends it when nobody does. ARGV: retention (s).
-- Returns 1, or 0 when there is none that has not ended.
local record = stored()
if not record or record.ended then
  return 0
elseif record.held then
  redis.call('HSET', RECORD, 'cancelled', 1)
else
  abort(record, ARGV[1])
end
return 1
