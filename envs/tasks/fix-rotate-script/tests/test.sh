#!/bin/sh
# 1 when the script does what was asked in every case.
#
# The script has the rights of this test. So the test is one function, which is read whole before the script runs, and
# whatever the script has left running is stopped before the reward is written, and killed before it is read.

main() {
    script=/app/rotate.sh
    reward=1
    [ -f "$script" ] || reward=0

    check "two of each" 2 "a-20260102.log a-20260103.log b-20260101.log" \
        a-20260101.log a-20260102.log a-20260103.log b-20260101.log
    check "one, over a change of the year" 1 "a-20260101.log" a-20251231.log a-20260101.log a-20251130.log
    check "none" 0 "note.txt" a-20260101.log b-20260101.log note.txt
    check "more than there are" 5 "a-20260101.log b-20260101.log" a-20260101.log b-20260101.log
    check "a program's name in another's" 1 "a-20260102.log data-20260101.log" \
        a-20260101.log a-20260102.log data-20260101.log
    check "hyphens" 1 "a-b-20260102.log a-20260101.log" a-b-20260101.log a-b-20260102.log a-20260101.log
    check "spaces" 1 "my_app-20260102.log my_app_two-20260101.log" \
        my_app-20260101.log my_app-20260102.log my_app_two-20260101.log
    check "no logs" 0 "a-2026010.log a-202601011.log a-2026010x.log a20260101.log a-20260101.log.gz a-20260101.txt" \
        a-2026010.log a-202601011.log a-2026010x.log a20260101.log a-20260101.log.gz a-20260101.txt
    check "patterns" 1 "*-20260102.log a-20260101.log" '*-20260101.log' '*-20260102.log' a-20260101.log
    check "an empty folder" 1 ""

    refused
    refused /tmp/case
    refused /tmp/none 1
    refused /tmp/case -1
    refused /tmp/case two
    refused /tmp/case ""

    # All but this shell stands still; the parent, which waits for this shell, goes on when the reward is there.
    kill -STOP -1 2>/dev/null
    rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
    echo "$reward" >/logs/verifier/reward.txt
    kill -CONT "$PPID" 2>/dev/null
    exit 0
}

# check NAME KEEP LEFT FILE...: the files that are LEFT; in names, _ stands for a space.
check() {
    case_name=$1 keep=$2 left=$3
    shift 3
    fresh
    for file in "$@"; do
        echo "$file" >"/tmp/case/$(printf '%s' "$file" | tr _ ' ')"
    done
    mkdir /tmp/case/inner
    echo x >/tmp/case/inner/a-20200101.log
    set -f
    want=$(for file in $left inner; do printf '%s\n' "$file"; done | tr _ ' ' | sort)
    set +f
    (cd / && timeout 10 sh "$script" /tmp/case "$keep" </dev/null >/dev/null 2>&1)
    code=$?
    got=$(ls -A /tmp/case | sort)
    if [ "$code" != 0 ] || [ "$got" != "$want" ] || [ ! -f /tmp/case/inner/a-20200101.log ]; then
        echo "case '$case_name': exit code $code, left: $got"
        reward=0
    fi
}

# refused ARGUMENT...: exit code 2, and nothing is gone.
refused() {
    fresh
    echo x >/tmp/case/a-20260101.log
    (cd /tmp/case && timeout 10 sh "$script" "$@" </dev/null >/dev/null 2>&1)
    code=$?
    if [ "$code" != 2 ] || [ ! -f /tmp/case/a-20260101.log ]; then
        echo "arguments '$*': exit code $code, should be 2"
        reward=0
    fi
}

fresh() {
    rm -rf /tmp/case
    mkdir /tmp/case
}

main
