-- Counts what a request has used in all, of which it adds to this hour what is more than was counted before. ARGV: id,
-- whether it has ended (1 or 0), prompt tokens, cached tokens, output tokens, how long (ms) closed requests are
-- remembered and those that are open not looked at, how long hours are kept (s).
-- What closed requests used is never counted again, and so is what nobody noted before.
local id, ended, keep = ARGV[1], ARGV[2] == '1', tonumber(ARGV[6])
local state = open_state(id)
if not state then
  redis.call('ZREM', PENDING, id)
  return 0
end
local moment = now()
local total = { 0, tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]) }
if total[2] + total[4] > 0 then
  total[1] = 1
end
local hour = HOURS .. string.format('%.0f', math.floor(moment / 3600000) * 3600)
local added = 0
for place, name in ipairs({ 'requests', 'prompt_tokens', 'cached_tokens', 'completion_tokens' }) do
  local more = total[place] - state.counted[place]
  if more > 0 then
    redis.call('HINCRBY', hour, name .. ' ' .. state.account, string.format('%.0f', more))
    state.counted[place], added = total[place], 1
  end
end
if added == 1 then
  redis.call('EXPIRE', hour, ARGV[7])
end
if not ended then
  state.where = 'seen'
  keep_state(id, state, moment + keep)
  return added
end
redis.call('ZADD', COUNTED, string.format('%.0f', moment), id)
redis.call('EXPIRE', COUNTED, math.ceil(keep / 1000))
redis.call('HDEL', OPEN, id)
redis.call('ZREM', PENDING, id)
local old = redis.call('ZRANGEBYSCORE', COUNTED, '-inf', string.format('%.0f', moment - keep), 'LIMIT', 0, 8)
if #old > 0 then
  redis.call('ZREM', COUNTED, unpack(old))
end
return added
