-- Included at the beginning of the scripts of the ledger, which is in a slot of its own: what tenants used, by the hour.
-- KEYS: pending, a sorted set of requests that are not counted to their end, by when (ms) their records are to be looked
-- at; open, a hash of the same requests, with what is known of each; counted, a sorted set of those that were counted to
-- their end, by when (ms); and the beginning of the names of the hours' hashes.
-- What is open has: 'here' when its record was written or is about to be, 'seen' once it was counted as far as it was,
-- 'gone' when its record was not there; requests, prompt tokens, cached tokens and
-- output tokens as they were counted so far; the same without requests as its router is about to write them; and its
-- account, the tenant and the model.
local PENDING, OPEN, COUNTED, HOURS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local UNATTENDED = 172800 -- s; when no router was there for so long, no record of theirs is left
local STATE = '^(%l+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$'

local function now() -- ms
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function open_state(id) -- nil when it is not known, or closed
  local where, requests, prompt, cached, completion, p, k, c, account =
    string.match(redis.call('HGET', OPEN, id) or '', STATE)
  if not where then
    return nil
  end
  return {
    where = where,
    counted = { tonumber(requests), tonumber(prompt), tonumber(cached), tonumber(completion) },
    intended = { tonumber(p), tonumber(k), tonumber(c) },
    account = account,
  }
end

local function keep_state(id, state, look) -- and when (ms) to look at its record
  local counts = { unpack(state.counted) }
  for _, count in ipairs(state.intended) do
    counts[#counts + 1] = count
  end
  redis.call('HSET', OPEN, id, state.where .. ' ' .. table.concat(counts, ' ') .. ' ' .. state.account)
  redis.call('ZADD', PENDING, string.format('%.0f', look), id)
  redis.call('EXPIRE', OPEN, UNATTENDED)
  redis.call('EXPIRE', PENDING, UNATTENDED)
end

