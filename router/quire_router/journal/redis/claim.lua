-- Takes the lease on a record that has none, with the next epoch.
-- ARGV: owner, the claim's own name, lease (ms), time to live (s), retention (s).
-- Returns the record's fields and its packed token log as they are then, and Redis' time (ms), or nothing if it is
-- leased, has ended or is not there.
local record = stored()
if not record or record.ended then
  return false
end
if redis.call('HGET', RECORD, 'claim') ~= ARGV[2] then -- else the reply to this claim was lost
  if record.leased then
    if record.overdue then -- from now on one lease, which its owner renews in time if it lives
      redis.call('HSET', RECORD, 'lease_expires', string.format('%.0f', now() + ARGV[3]))
    end
    return false
  elseif record.cancelled then
    abort(record, ARGV[5])
    return false
  end
  redis.call('HSET', RECORD, 'claim', ARGV[2])
  hold(ARGV[1], string.format('%.0f', record.epoch + 1), tonumber(ARGV[3]), ARGV[4])
end
local log = redis.pcall('GET', TOKENS)
if type(log) == 'table' then
  log = 'damaged' -- the key is something else's; seven bytes are no log
end
return { redis.call('HGETALL', RECORD), log or '', string.format('%.0f', now()) }
