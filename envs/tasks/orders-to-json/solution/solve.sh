#!/bin/sh
set -e
cd /app
sed 1d orders.csv | awk '
    # The fields of the line are field[1], field[2], ...
    function split_line(line,    count, at, inside, character) {
        count = 1
        field[1] = ""
        inside = 0
        for (at = 1; at <= length(line); at++) {
            character = substr(line, at, 1)
            if (character == "\"") {
                if (inside && substr(line, at + 1, 1) == "\"") {
                    field[count] = field[count] "\""
                    at++
                } else
                    inside = !inside
            } else if (character == "," && !inside)
                field[++count] = ""
            else
                field[count] = field[count] character
        }
    }
    function escaped(text,    out, at, character) {
        out = ""
        for (at = 1; at <= length(text); at++) {
            character = substr(text, at, 1)
            out = out (character == "\"" || character == "\\" ? "\\" : "") character
        }
        return out
    }
    {
        split_line($0)
        cents = field[3]
        sub(/\./, "", cents)
        printf "%d\t{\"order\":%d,\"customer\":\"%s\",\"total_cents\":%d}\n", \
            field[1], field[1], escaped(field[2]), cents * field[4]
    }' | sort -n | cut -f 2- >orders.jsonl
