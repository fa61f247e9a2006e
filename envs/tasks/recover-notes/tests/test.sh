#!/bin/sh
# 1 when every byte of the file is there.
reward=0
if [ -f /app/notes.txt ] && [ "$(sha256sum </app/notes.txt)" = "$(cat /tests/expected.sha256)  -" ]; then
    reward=1
else
    echo "notes.txt is missing or differs"
fi
echo "$reward" >/logs/verifier/reward.txt
