-- Included at the beginning of the scripts that store a time. KEYS: requests, tokens, running, clock. The last one is the
-- latest time (us) that they have seen, for as long as one of the others. If Redis' clock is behind it, as it went back or
-- a replica on another machine was promoted, all times are set back by as much: debts and leases stay what they were.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function digits(number)
  return string.format('%.0f', number)
end

local function keep_clock(duration) -- us for which a time that is stored now counts
  local left = math.max(redis.call('PTTL', KEYS[4]), math.ceil(duration / 1000), 1)
  redis.call('SET', KEYS[4], digits(now), 'PX', left)
end

local back = (tonumber(redis.call('GET', KEYS[4]) or '') or 0) - now
if back > 0 then
  for i = 1, 2 do
    local full = tonumber(redis.call('GET', KEYS[i]) or '')
    if full then
      redis.call('SET', KEYS[i], digits(full - back), 'KEEPTTL')
    end
  end
  local running = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
  for i = 1, #running, 2 do
    redis.call('ZADD', KEYS[3], digits(running[i + 1] - back), running[i])
  end
  keep_clock(0)
end

