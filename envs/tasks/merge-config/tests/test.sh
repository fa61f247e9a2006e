#!/bin/sh
# 1 when the merged file is what it should be, a file of its own, and the others are as they were.
cd /app || exit 1
reward=0
if [ ! -f merged.conf ] || [ -L merged.conf ]; then
    echo "there is no file merged.conf"
elif [ "$(cat merged.conf)" != "$(cat /tests/expected.conf)" ]; then
    echo "merged.conf differs"
elif ! sha256sum -c /tests/inputs.sha256 >/dev/null 2>&1 || [ "$(ls -A conf | wc -l)" -ne 3 ]; then
    echo "the files of conf were changed"
else
    reward=1
fi
echo "$reward" >/logs/verifier/reward.txt
