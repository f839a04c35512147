#!/bin/sh
# Writes the users of Redis and its address for the service, from a password that is there: users.sh FOLDER [HOST].
set -eu
folder=$1
host=${2:-redis}
umask 077
password=$(cat "$folder/redis_password")
digest=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
{
    # Off: nobody can be this user. It has all rights, because Redis reads its append-only file as this user, and leaves
    # out the transactions that it may not do (https://github.com/redis/redis/issues/14541).
    echo "user default off ~* &* +@all"
    echo "user automap on #$digest ~automap:* ~rq:* +@all -@dangerous -@scripting +info"
} >"$folder/redis_users"
printf 'redis://automap:%s@%s:6379/0' "$password" "$host" >"$folder/redis_url"
[ -e "$folder/metrics_key" ] || : >"$folder/metrics_key"
# The containers read them as users of their own; on this host nobody but you comes into the folder, and may change them.
chmod 644 "$folder/redis_users" "$folder/redis_url" "$folder/redis_password" "$folder/metrics_key"
chmod 700 "$folder"
