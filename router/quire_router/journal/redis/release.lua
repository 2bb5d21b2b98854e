-- Gives up the lease on a record that has not ended, or ends it if it was cancelled.
-- ARGV: owner, epoch, time to live (s), retention (s).
local record = stored()
local refused = refusal(record, ARGV[1], tonumber(ARGV[2]))
if refused then
  return refused
elseif record.ended then
  return DONE
elseif record.cancelled then
  abort(record, ARGV[4])
else
  redis.call('HDEL', RECORD, 'lease_expires')
  keep(ARGV[3])
end
return DONE
