-- Writes values (tokens and markers) at an offset of the token log, which ends with them, and renews the lease; without
-- any it only renews. ARGV: owner, epoch, lease (ms), time to live (s), offset in bytes, packed values, the checksum of
-- the log with them, how many tokens it has (empty: not known), and the model's version (empty: as before).
local record = stored()
local refused = refusal(record, ARGV[1], tonumber(ARGV[2]))
if refused then
  return refused
elseif record.ended then
  return DONE -- this is a repeat
end
local offset, length = tonumber(ARGV[5]), redis.call('STRLEN', TOKENS)
if length < offset then
  return LOST
elseif length > offset + #ARGV[6] then
  -- A former owner was cut off within a delta. What is left of it must not follow this one's.
  local before = offset > 0 and redis.call('GETRANGE', TOKENS, 0, offset - 1) or ''
  redis.call('SET', TOKENS, before .. ARGV[6])
elseif #ARGV[6] > 0 then
  redis.call('SETRANGE', TOKENS, offset, ARGV[6])
end
local fields = { 'sum', ARGV[7] }
if ARGV[8] ~= '' then
  fields[3], fields[4] = 'told', ARGV[8]
end
if ARGV[9] ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'version', ARGV[9]
end
hold(ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], unpack(fields))
return record.cancelled and CANCELLED or DONE
