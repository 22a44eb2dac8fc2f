import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Stream;

/** Java's own HTTP client against a server: java tools/JdkClient.java URL.  It offers h2c with every first request. */
public class JdkClient {
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static String url;

    static HttpRequest ask(String path, String fields) {
        String body = "{\"model\": \"bundled\", \"max_tokens\": 8, \"temperature\": 0, " + fields + "}";
        return HttpRequest.newBuilder(URI.create(url + path)).header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    static String send(HttpRequest request, int status) throws Exception {
        HttpResponse<String> answer = CLIENT.send(request, HttpResponse.BodyHandlers.ofString());
        require(answer.statusCode() == status, answer.statusCode() + ": " + answer.body());
        return answer.body();
    }

    static void require(boolean holds, String what) {
        if (!holds) throw new AssertionError(what);
    }

    public static void main(String[] args) throws Exception {
        url = args[0];
        String chat = "\"messages\": [{\"role\": \"user\", \"content\": \"def mean(xs):\"}]";
        require(send(ask("/chat/completions", chat), 200).contains("\"completion_tokens\":"), "no usage");
        require(send(ask("/completions", "\"prompt\": \"def f(x):\""), 200).contains("\"text\":"), "no text");
        try (Stream<String> lines = CLIENT.send(
                ask("/chat/completions", chat + ", \"stream\": true"), HttpResponse.BodyHandlers.ofLines()).body()) {
            List<String> events = lines.filter(line -> !line.isEmpty()).toList();
            require(events.get(events.size() - 1).equals("data: [DONE]"), "the stream has no end");
        }
        List<CompletableFuture<HttpResponse<String>>> many = Stream.generate(() -> ask("/chat/completions", chat))
            .limit(8).map(one -> CLIENT.sendAsync(one, HttpResponse.BodyHandlers.ofString())).toList();
        for (CompletableFuture<HttpResponse<String>> one : many) require(one.get().statusCode() == 200, "at once");
        // Larger than a socket's buffers, in chunks.
        HttpRequest large = ask("/completions", "\"prompt\": \"" + "x ".repeat(200_000) + "\"");
        require(send(large, 400).contains("context"), "another reason");
    }
}
