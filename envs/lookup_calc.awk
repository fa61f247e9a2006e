# The two tools of the lookup_calc environment, run inside the sandbox with any POSIX awk.
#
#   awk -f lookup_calc.awk lookup KEY table.tsv       prints the value of KEY
#   awk -f lookup_calc.awk calculate EXPRESSION       prints the value of an arithmetic expression
#
# The expression is parsed by recursive descent (numbers, + - * /, parentheses); nothing is ever evaluated as
# code. Exit code 0: the result is on stdout. Exit code 1: one line on stdout says what is wrong and how to go on.

BEGIN {
    if (ARGV[1] == "lookup") lookup(ARGV[2], ARGV[3])
    else calculate(ARGV[2])
    exit status
}

function fail(text) {
    print text
    status = 1
}

function lookup(key, table,    line, cells, known) {
    while ((getline line < table) > 0) {
        split(line, cells, "\t")
        if (cells[1] == key) { print cells[2]; return }
        known = known (known == "" ? "" : ", ") cells[1]
    }
    fail("error: unknown key " quoted(key) "; known keys: " known)
}

function calculate(expression,    value) {
    text = expression
    gsub(/[ \t]/, "", text)
    place = 1
    # Without this, "1 2" would be 12 once the blanks are gone.
    problem = expression ~ /[0-9.][ \t]+[0-9.]/ ? "two numbers without an operator between them" : ""
    if (problem == "") value = sum(0)
    if (problem == "" && place <= length(text)) problem = "unexpected " quoted(substr(text, place, 1))
    # It would be written as inf or nan.
    if (problem == "" && shown(value) ~ /n/) problem = "the result is too large"
    if (problem != "") fail("error: " problem " in " quoted(expression) "; use numbers, + - * / and parentheses")
    else print shown(value)
}

# The beginning is enough for a model to know what it wrote.
function quoted(value) { return "'" (length(value) > 200 ? substr(value, 1, 200) "..." : value) "'" }

function shown(value) {
    if (value == int(value) && value < 1e15 && value > -1e15) return sprintf("%.0f", value)
    return sprintf("%.10g", value)
}

function peek() { return substr(text, place, 1) }

function sum(depth,    left, operator) {
    left = product(depth)
    while (problem == "" && (peek() == "+" || peek() == "-")) {
        operator = peek(); place++
        left = operator == "+" ? left + product(depth) : left - product(depth)
    }
    return left
}

function product(depth,    left, right, operator) {
    left = atom(depth)
    while (problem == "" && (peek() == "*" || peek() == "/")) {
        operator = peek(); place++
        right = atom(depth)
        if (problem != "") return 0
        if (operator == "*") left = left * right
        else if (right == 0) { problem = "division by zero"; return 0 }
        else left = left / right
    }
    return left
}

function atom(depth,    value, digits) {
    if (depth > 50) { problem = "too many nested parentheses"; return 0 }
    if (peek() == "-") { place++; return -atom(depth + 1) }
    if (peek() == "(") {
        place++
        value = sum(depth + 1)
        if (problem == "" && peek() != ")") problem = "missing ')'"
        place++
        return value
    }
    if (match(substr(text, place), /^([0-9]+(\.[0-9]*)?|\.[0-9]+)/)) {
        digits = substr(text, place, RLENGTH)
        place += RLENGTH
        return digits + 0
    }
    problem = place > length(text) ? "unexpected end" : "unexpected " quoted(peek())
    return 0
}
