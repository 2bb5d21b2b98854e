-- Included at the beginning of every script. KEYS: record, tokens. ARGV: owner, epoch, then as each script documents.
-- A record is a hash: request, prompt, conversation, where there is one, and their checksum 'seal'; version, that of the
-- model that the log is of; owner, epoch and lease_expires (ms); 'sum', the checksum of the token log, and told, how many
-- tokens it has; claim, the name of the last one; cancelled; opened (ms), when it began by this clock; retention (s),
-- where the request has its own; and of one that has ended reason, error, usage and 'ended', when (ms).
-- Each writes first with a command that Redis refuses when it is out of memory, so that it changes all or nothing: a
-- DEL or a ZREM is not refused. (No script declares flags: Redis 6 does not know them.)
-- Scripts return DONE; STALE when another owner or a newer epoch has the record, so that the writer has lost it; LOST
-- when the database has not, or no longer, what was written before; CANCELLED when it is done and the request is to end;
-- DELETED when nothing is written, as the record was deleted.
local DONE, STALE, LOST, CANCELLED, DELETED = 1, 0, -1, 2, 3
local RECORD, TOKENS = KEYS[1], KEYS[2]
local MAX_LEASE = 10000 -- ms; no lease is longer, so what ends later was written before the clock went back

local moment

local function now() -- ms, by the only clock that leases know; the same throughout a script
  if not moment then
    local time = redis.call('TIME')
    moment = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return moment
end

local function stored() -- nil when there is no record
  local values = redis.call('HMGET', RECORD, 'epoch', 'owner', 'reason', 'lease_expires', 'cancelled', 'retention')
  if not values[1] then
    return nil
  end
  if #values[1] > 15 or not string.find(values[1], '^%d+$') then
    error('DAMAGED: the epoch is not a number')
  end
  local remains = (tonumber(values[4] or '') or 0) - now()
  return {
    epoch = tonumber(values[1]),
    owner = values[2],
    ended = values[3],
    leased = remains > 0,
    overdue = remains > MAX_LEASE,
    cancelled = values[5],
    retention = values[6] and #values[6] < 10 and string.find(values[6], '^%d+$') and values[6],
  }
end

local function refusal(record, owner, epoch) -- nil when the lease may write
  if not record or record.epoch < epoch then
    return LOST -- an older state came back: its log need not be this writer's
  elseif record.epoch > epoch or record.owner ~= owner then
    return STALE
  end
end

local function keep(seconds)
  redis.call('EXPIRE', RECORD, seconds)
  redis.call('EXPIRE', TOKENS, seconds)
end

local function hold(owner, epoch, lease, seconds, ...) -- and writes other fields with it
  local expires = string.format('%.0f', now() + lease)
  redis.call('HSET', RECORD, 'owner', owner, 'epoch', epoch, 'lease_expires', expires, ...)
  keep(seconds)
end

local function finish(record, reason, message, usage, retention) -- the record's own retention comes first
  redis.call('HSET', RECORD, 'reason', reason, 'error', message, 'usage', usage, 'ended', string.format('%.0f', now()))
  redis.call('HDEL', RECORD, 'lease_expires')
  keep(record.retention or retention)
end

local function abort(record, retention) -- with a new epoch, so that the former owner learns that it has ended
  redis.call('HSET', RECORD, 'owner', '', 'epoch', string.format('%.0f', record.epoch + 1))
  finish(record, 'abort', '', '', retention)
end

