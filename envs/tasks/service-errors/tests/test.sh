#!/bin/sh
# 1 when the report is what it should be, line for line; spaces at the end of a line do not count.
report=/app/report.tsv
reward=0
if [ -f "$report" ] && [ "$(sed 's/[[:space:]]*$//' "$report")" = "$(cat /tests/expected.tsv)" ]; then
    reward=1
else
    echo "report.tsv is missing or differs"
fi
echo "$reward" >/logs/verifier/reward.txt
