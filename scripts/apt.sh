# shellcheck shell=bash
# What the scripts share about apt: sourced, not run.

# Refreshes apt's lists; only root can. Mirrors hiccup: a few attempts, then the user hears apt's own words.
apt_update() {
  local attempt
  for attempt in 1 2 3; do
    if DEBIAN_FRONTEND=noninteractive apt-get update -qq; then
      return 0
    fi
    echo "apt-get update failed (attempt $attempt of 3)" >&2
    sleep $((attempt * 2))
  done
  return 1
}

# Fails with a message that ends the script.
die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}
