-- Notes a request whose record is about to be written: opened, ended or released; so that what it uses is counted even
-- if its router dies. ARGV: id, account, and what it has used when it is about to end or to be released: prompt tokens,
-- cached tokens, output tokens (else empty); and 'again' where the record is known to be a new one, which has the id of
-- a request that was counted to its end.
local id, account = ARGV[1], ARGV[2]
if ARGV[6] == 'again' then
  redis.call('ZREM', COUNTED, id)
elseif redis.call('ZSCORE', COUNTED, id) then
  return 0 -- this is a repeat
end
local state = open_state(id) or { counted = { 0, 0, 0, 0 }, intended = { 0, 0, 0 } }
state.where, state.account = 'here', account
if ARGV[3] ~= '' then
  state.intended = { tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]) }
end
keep_state(id, state, now())
return 1
