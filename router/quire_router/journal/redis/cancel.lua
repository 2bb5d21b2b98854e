-- Marks a leased record as cancelled, and ends one without a lease. ARGV: retention (s).
-- Returns 1, or 0 when there is none that has not ended.
local record = stored()
if not record or record.ended then
  return 0
elseif record.leased then
  redis.call('HSET', RECORD, 'cancelled', 1)
else
  abort(record, ARGV[1])
end
return 1
