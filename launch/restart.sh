#!/bin/sh
# Run a command, and again whenever it exits with 75 (preempted, state saved) or 70 (hung, ended by its watchdog):
#
#     launch/restart.sh realm train --config=configs/wiki_small.py --workdir=runs/wiki_small
#
# Any other exit code is handed on. For schedulers that send SIGTERM to the job and leave its machine running.
while true; do
    "$@"
    code=$?
    [ "$code" -eq 75 ] || [ "$code" -eq 70 ] || exit "$code"
done
