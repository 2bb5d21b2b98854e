-- Deletes a record. A router that still writes it, or repeats a write, finds no record, opens it again and is refused by
-- the tombstone, which names the request: a later one with the same id may be opened.
-- KEYS: also the tombstone. ARGV: how long (s) that is kept, and the SHA-1 of a request that has a record in the caller's
-- memory and may have none here (else empty). Returns 1, or 0 when there was no record here.
local record = stored()
if not record and ARGV[2] == '' then
  return 0
end
local request = redis.call('HGET', RECORD, 'request')
redis.call('SET', KEYS[3], request and redis.sha1hex(request) or ARGV[2], 'EX', ARGV[1])
redis.call('DEL', RECORD, TOKENS)
return record and 1 or 0
