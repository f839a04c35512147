#!/bin/sh
# Writes docker/.env, which `docker compose -f docker/compose.yaml` reads: the images that are not built here, by the
# digests that their registries give for their tags now. Run it again, and try the result, to take their updates.
set -eu
cd "$(dirname "$0")"
sed -n 's/.*${\([A-Z]*_IMAGE\):-\(.*\)}.*/\1 \2/p' compose.yaml | while read -r name image; do
    digest=$(docker buildx imagetools inspect "$image" | sed -n 's/^Digest: *//p')
    case $digest in
        sha256:????????????????????????????????????????????????????????????????) echo "$name=$image@$digest" ;;
        *) echo "no digest of $image was found" >&2; exit 1 ;;
    esac
done > .env.new
mv .env.new .env
