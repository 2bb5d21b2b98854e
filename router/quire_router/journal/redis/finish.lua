-- Ends a record; it is kept for the retention time.
-- ARGV: owner, epoch, retention (s), reason, error, usage, length of the log in bytes (-1: whatever there is).
local record = stored()
local refused = refusal(record, ARGV[1], tonumber(ARGV[2]))
if refused then
  return refused
elseif record.ended then
  return DONE -- a repeat
end
local length = tonumber(ARGV[7])
if length >= 0 and redis.call('STRLEN', TOKENS) ~= length then
  return LOST
end
if record.cancelled then -- ABORT was the reply to cancel
  finish(record, 'abort', '', ARGV[6], ARGV[3])
else
  finish(record, ARGV[4], ARGV[5], ARGV[6], ARGV[3])
end
return DONE
