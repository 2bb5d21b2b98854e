-- A request's record is not there. ARGV: id, how long (ms) what was counted of it is remembered.
-- Returns 0 if nothing is known of what it used, so that it is lost; else 1.
local id, keep = ARGV[1], tonumber(ARGV[2])
local state = open_state(id)
if state and state.where ~= 'gone' and state.counted[1] > 0 then -- its router may live, and write it again
  state.where = 'gone'
  keep_state(id, state, now() + keep)
  return 1
end
redis.call('HDEL', OPEN, id)
redis.call('ZREM', PENDING, id)
return state and state.where == 'here' and 0 or 1
