#!/bin/sh
# Entry point of the images: check what the image promises, then become `mega-rl` with the arguments of the container.
# MEGA_RL_REQUIRE= (empty) leaves the check out, say for `plan` on a machine without a GPU.
set -eu
if [ -n "${MEGA_RL_REQUIRE:-}" ] && [ "${1:-}" != doctor ]; then
    # What is there is no news; what is missing is said on the error stream, so that it mixes with no command's output.
    missing=$(mega-rl doctor --require "$MEGA_RL_REQUIRE") || {
        code=$?
        printf '%s\n' "$missing" >&2
        echo "mega-rl does not start without it; MEGA_RL_REQUIRE= (empty) starts it anyway" >&2
        exit "$code"
    }
fi
exec mega-rl "$@"
