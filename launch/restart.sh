#!/bin/sh
# Run a command, and again whenever it exits with 75 (preempted, state saved) or 70 (hung, ended by its watchdog):
#
#     launch/restart.sh realm train --config=configs/wiki_small.py --workdir=runs/wiki_small
#
# Any other exit code is handed on, and so is the third 70 in a row. For schedulers that send SIGTERM to the job and leave
# its machine running.
hung=0
while true; do
    "$@"
    code=$?
    case $code in
    75) hung=0 ;;
    70) hung=$((hung + 1)) && [ "$hung" -lt 3 ] || exit 70 ;;
    *) exit "$code" ;;
    esac
done
